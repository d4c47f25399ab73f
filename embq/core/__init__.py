"""The words that every embq service shares: errors, units, models, results, broker, ledger and the output folder."""
