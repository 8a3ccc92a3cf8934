"""What works on whole models: abstract calls, reports, hooks, optimizers."""
