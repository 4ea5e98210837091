"""The host service: starts workers and loaders, keeps copies of their descriptors, talks to systemd."""
