"""`python -m offloadd`: the same as the console command."""

from offloadd.cli.main import run

if __name__ == "__main__":
    run()
