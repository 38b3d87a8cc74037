"""How a run starts: its parts, its plan, its jobs on several hosts, resume and branch."""
