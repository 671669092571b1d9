"""Pools of records that fill themselves, in memory or in a folder that processes share."""
