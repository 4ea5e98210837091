"""The commands weightcached and weightcachectl."""
