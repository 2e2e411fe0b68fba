"""The highest load that keeps an objective: its search, and what to say about it."""
