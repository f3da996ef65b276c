"""Everything Envoy speaks: the ext_proc stream, access log, endpoint discovery, and its rendered configuration."""
