"""Commands beside a run and a simulation, each a file with main(arguments) -> exit code."""
