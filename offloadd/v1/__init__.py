"""Generated from protos/offloadd/v1 by `make proto`; do not edit."""
