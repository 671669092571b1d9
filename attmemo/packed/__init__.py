"""Exact blocks over packed tokens: no padding, each different sequence once, first rows where a head reads no more."""
