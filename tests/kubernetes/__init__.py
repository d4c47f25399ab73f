"""Helm chart and fleets on Kubernetes, by real helm and kubectl: `make test-kubernetes`. No cluster is needed."""
