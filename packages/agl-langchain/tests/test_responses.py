"""Models of LangChain that speak the Responses API keep the adapter contract too."""

from collections.abc import Mapping
from typing import Any, ClassVar

from langchain_openai import ChatOpenAI

import agl

from .test_contract import TestLangChain as Contract


class TestResponses(Contract):
    """The same situations, through the Responses API."""

    impossible: ClassVar[Mapping[str, str]] = {"choices": "a response is one answer"}

    async def run(self, situation: str, llm: agl.LLM) -> Any:
        chat = ChatOpenAI(**llm.openai(), max_retries=1, use_responses_api=True)
        await getattr(self, situation)(chat)


del Contract  # else pytest runs it here too
