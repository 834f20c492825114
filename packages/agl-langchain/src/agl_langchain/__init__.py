"""Train any LangChain or LangGraph agent with agl."""
