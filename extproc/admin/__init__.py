"""What operators ask a keeper, over HTTP and gRPC: the same calls, one implementation."""
