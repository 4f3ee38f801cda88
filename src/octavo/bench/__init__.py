"""Benchmarks: workloads, the load client, offline runs, and what is made of their numbers.

Owns the measuring; the command line is in `cli`. May import the engine and below, never the server: a server is
measured from outside, over HTTP.
"""
