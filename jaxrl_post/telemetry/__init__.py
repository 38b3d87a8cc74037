"""What a run says about itself: events, timings, metrics, logs, traces and reports."""
