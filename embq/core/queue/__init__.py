"""Everything that stands in the broker: keys, scripts, the ledger, hints, results, registries, uploads."""
