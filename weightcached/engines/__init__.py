"""Adapters that put attached weights into the models of an engine."""
