"""What clients reach: the attach socket and the gRPC services."""
