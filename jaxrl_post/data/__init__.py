"""Data: tokenizers, chat templates, procedural tasks, and the order in which prompts come."""
