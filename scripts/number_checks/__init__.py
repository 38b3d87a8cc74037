"""The parts of the show numbers: one module for each kind of number, with a function `show(record)`."""
