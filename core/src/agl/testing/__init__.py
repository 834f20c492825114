"""The published test kit: a scripted engine, a model server that answers as vLLM does, an adapter contract.

```python
with ModelServer(lambda prompt, labels: "4") as server:
    agent(task, agl.LLM(f"{server.url}/v1", key="any"))
assert server.exchanges[0].choices[0].response_ids == encode("4")
```

The contract that every adapter inherits is in `agl.testing.contract`. Needs ``pip install "agl[testing]"``.
"""

from agl.testing.engine import ByteTokenizer, ScriptedEngine, tool_call
from agl.testing.server import Exchange, Fault, ModelServer

__all__ = ["ByteTokenizer", "Exchange", "Fault", "ModelServer", "ScriptedEngine", "tool_call"]
