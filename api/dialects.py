"""Errors in the words of protocols that are not ours: a problem, and beside its members what their clients look for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

from api.problems import Problem, of
from broker import BrokerError


class DialectRoute(APIRoute, ABC):
    @staticmethod
    @abstractmethod
    def error(problem: Problem) -> object:
        """The member `error`."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def told(request: Request) -> Response:
            try:
                return await handle(request)
            except (Problem, BrokerError) as error:
                raise self.in_its_words(of(error)) from None

        return told

    def in_its_words(self, problem: Problem) -> Problem:
        """The problem with what the protocol's clients look for."""
        return replace(problem, extra={**problem.extra, "error": self.error(problem)})


class OpenAIRoute(DialectRoute):
    """OpenAI's clients show `error.message`."""

    @staticmethod
    def error(problem: Problem) -> object:
        fields = problem.extra.get("errors")
        param = fields[0]["field"] if isinstance(fields, list) and fields else None
        slug = problem.kind.slug
        return {"message": problem.detail, "type": slug, "param": param, "code": slug}


class OpenInferenceRoute(DialectRoute):
    """The Open Inference Protocol wants a text."""

    @staticmethod
    def error(problem: Problem) -> object:
        return problem.detail
