"""The laboratory: tasks, training runs, fair comparisons, results and plots. Nothing else in the package imports it."""
