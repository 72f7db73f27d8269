"""A worker that does nothing until its front is gone."""

import argparse
import socket

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int)
    socket.socket(fileno=parser.parse_args().fd).recv(1)
