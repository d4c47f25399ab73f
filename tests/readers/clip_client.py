"""Asks a server through clip-retrieval's own client class, in its environment. Nothing of embq is imported here.

    python clip_client.py URL < questions

takes a JSON object `{"client": {...}, "queries": [{...}]}` of arguments for the class and for its method `query`, and
prints what each query gives, as one JSON object.
"""

import importlib.metadata
import importlib.util
import json
import sys


def client_module():
    """The module of the class by itself: the package imports its back end and its models too, which are not here."""
    (path,) = (
        file.locate()
        for file in importlib.metadata.files("clip-retrieval")
        if str(file) == "clip_retrieval/clip_client.py"
    )
    spec = importlib.util.spec_from_file_location("clip_client", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def main(url):
    import requests

    module, asked = client_module(), json.load(sys.stdin)
    options = dict(asked["client"])
    if "modality" in options:
        options["modality"] = module.Modality(options["modality"])
    client = module.ClipClient(url=f"{url}/knn-service", **options)
    answers = [client.query(**query) for query in asked["queries"]]
    ids = [row["id"] for row in answers[0]]
    described = requests.post(f"{url}/metadata", json={"ids": ids, "indice_name": options["indice_name"]}, timeout=60)
    listed = requests.get(f"{url}/indices-list", timeout=60)
    told = {
        "version": importlib.metadata.version("clip-retrieval"),
        "answers": answers,
        "metadata": described.json(),
        "indices": listed.json(),
    }
    sys.stdout.write("\n" + json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
