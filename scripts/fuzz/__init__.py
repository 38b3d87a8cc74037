"""Malformed inputs for every reader of the project: one module for each kind of input.

A module has a class `Cases(folder)` with a method `case(index, random)`. It writes a malformed input below `folder` and
returns what it is and an action that reads it. The same kind, seed and index give the same case.
"""
