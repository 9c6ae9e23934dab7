"""Integrations: replication through the hook points of other libraries, one file for each library."""
