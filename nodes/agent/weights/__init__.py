"""Weights on a node: fetched once, checked, given to other nodes, and never lost by accident.

sources.py   what a launch asks for, and which files those are
store.py     what is on the disk: found, checked, given back, removed
fetches.py   the fetches of a node: shared, bounded, with room made for them
child.py     the process that moves the bytes of one of them
hub.py, peers.py   where it has them from
"""
