"""fsspec clients with timeouts, bounded answers and checked hosts; imported only where their scheme is used."""
