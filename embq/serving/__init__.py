"""`embq serve`: indices over HTTP, under the names of clip-retrieval's back end.

A request's way: `door` (may it come in), `app` (which route), `knn_request` (what is asked), `indices` (which version
is searched), `models` (query -> vector), `knn` (search, duplicates, rows). `refusals` says why there is no answer.
"""
