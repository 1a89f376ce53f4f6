"""Casts around operations."""
