"""A real MCP server on standard input and output, with a tool that works, one that fails and one that asks a model."""

from mcp.server.fastmcp import Context, FastMCP
from mcp.types import SamplingMessage, TextContent

server = FastMCP("sums")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it never works")


@server.tool()
async def ask(ctx: Context) -> str:
    """Ask the model of whoever called."""
    question = SamplingMessage(role="user", content=TextContent(type="text", text="what is agl?"))
    answer = await ctx.session.create_message(messages=[question], max_tokens=50)
    return getattr(answer.content, "text", "")


server.run("stdio")
