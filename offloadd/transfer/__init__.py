"""Moving bytes inside one machine's memory, and their checksums."""
