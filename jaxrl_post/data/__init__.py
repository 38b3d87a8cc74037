"""Data: tokenizers, chat templates, procedural tasks, and the order of prompts. A refusal is one sentence with its place."""
