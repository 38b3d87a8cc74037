"""The page report.html of one or several runs: what is read of a run's folder, and how it becomes one file.

run_files   which files a run has, and where
thinned     which steps of a long run are shown
curves      metrics by step
spans       where the time went, and lengths, by step
tokens      text of single tokens
rollouts    which rollouts are shown, and all that is shown of them
document    the page: template, style, scripts and data in one file
"""
