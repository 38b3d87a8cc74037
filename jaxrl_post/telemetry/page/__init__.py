"""The page report.html of one or several runs: what is read of a run's folder, and how it becomes one file.

- curves: metrics by step, and which steps of a long run are shown.
- spans: where the time went, and lengths, by step.
- rollouts: which rollouts are shown, and what is shown of each token.
- document: the page itself, with template, style, scripts and data in one file.
"""
