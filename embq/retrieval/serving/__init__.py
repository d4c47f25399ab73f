"""`embq serve`: indexes over HTTP, with the endpoints of clip-retrieval's back end and `/search` for `embq search`.

A request passes `middleware` (host, origin, load), `app` (routes), `requests` (its fields), `indices` (which index),
`query_models` (query to vector) and `search` (neighbours and their rows). `http_errors` holds the errors.
`index_discovery` finds new indexes and new versions of served ones; `startup` opens everything.
"""
