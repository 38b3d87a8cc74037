"""Rollouts from weights: rows of a step, computed by compiled programs on a mesh.

A decode step goes through six stations:

1. `host/row_host.py`, `RowHost.step`: seats waiting sequences, gives them pages, and chooses how many rows a step has.
2. `host/packing.py`: writes what the programs must know of every slot into one packed matrix.
3. `row_engine.py`, `MeshDevice.dispatch`, and `compiled.py`, `Programs.dispatch`: start the compiled program.
4. `row_program.py`, `dispatch` and `_step`: a loop of steps on the device. `row_plan.py` gives rows to sequences, the model
   runs once over the rows, and a kernel samples and verifies.
5. `compiled.py`, `read`: the one read from the device.
6. `host/row_host.py`, `_collect`: settled tokens go to their sequences, and finished ones become rollouts.
"""
