"""Scheduling policies: who goes first, and who gives way. The scheduler keeps correctness whatever they say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from octavo.request import Request

Rank = tuple[float, ...]
Order = Callable[[Request], Rank]  # fixed for the life of a request; the lowest goes first


def fcfs(request: Request) -> Rank:
    return (request.arrival_s, request.request_id)


def priority(request: Request) -> Rank:
    return (request.priority, request.arrival_s, request.request_id)


ORDERS: Mapping[str, Order] = {"fcfs": fcfs, "priority": priority}


def victim(candidates: Sequence[Request], order: Order) -> Request:
    """The request that loses its KV when a better one needs blocks: the one that would be served last."""
    return max(candidates, key=order)
