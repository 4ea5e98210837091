"""One process per device: its catalogue of shards, its leases and its socket."""
