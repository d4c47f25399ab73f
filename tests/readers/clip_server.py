"""Runs clip-retrieval's own back end, in its environment. Nothing of embq is imported here.

    python clip_server.py INDICES_PATHS.json PORT

Only its models are left out, which nothing here could download: queries are vectors, `torch` and `all_clip` are empty.
"""

import importlib.util
import sys
import types


def leave_out_models():
    """Make the package without its `__init__`, which imports all models, and empty modules for what it embeds with."""
    found = importlib.util.find_spec("clip_retrieval")
    package = types.ModuleType("clip_retrieval")
    package.__path__, package.__file__ = list(found.submodule_search_locations), found.origin
    torch, all_clip = types.ModuleType("torch"), types.ModuleType("all_clip")
    torch.cuda = types.SimpleNamespace(is_available=lambda: False)
    all_clip.load_clip = lambda *_, **__: (None, None, None)
    sys.modules.update(clip_retrieval=package, torch=torch, all_clip=all_clip)


def main(indices_paths, port):
    leave_out_models()
    import flask
    from clip_retrieval.clip_back import clip_back

    run = flask.Flask.run
    flask.Flask.run = lambda app, **options: run(app, **{**options, "host": "127.0.0.1"})
    clip_back(indices_paths=indices_paths, port=int(port), default_backend=f"http://127.0.0.1:{port}")


if __name__ == "__main__":
    main(*sys.argv[1:])
