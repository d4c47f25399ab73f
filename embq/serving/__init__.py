"""`embq serve`: indices over HTTP, under the names of clip-retrieval's back end and for `embq search`.

A request's way: `door` (may it come in), `app` (which route), `knn_request` (what is asked), `indices` (which version
is searched), `models` (query -> vector), `knn` (search, duplicates, rows). For `/search` it is `search_request` and
`searches`. `refusals` says why there is no answer. `watching` takes up new versions, `following` new indices;
`changes` is what follows from that.
"""
