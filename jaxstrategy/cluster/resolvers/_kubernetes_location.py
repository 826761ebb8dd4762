"""Where a program runs that asks Kubernetes: `KubernetesExecutableLocation`."""

from __future__ import annotations

import enum


class KubernetesExecutableLocation(enum.Enum):
    """Where the program runs, which decides how it reaches the API of Kubernetes.

    `WITHIN_CLUSTER`: in a pod, with the pod's service account. `OFF_CLUSTER`: anywhere
    else, with the user's kubeconfig.

    >>> js.cluster_resolver.KubernetesExecutableLocation(1).name
    'OFF_CLUSTER'
    """

    WITHIN_CLUSTER = 0
    OFF_CLUSTER = 1
