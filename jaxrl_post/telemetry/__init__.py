"""Listeners to a run: metrics, screen, alarms, traces, length bias, loggers and reports."""
