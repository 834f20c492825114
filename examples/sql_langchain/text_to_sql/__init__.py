"""A text-to-SQL agent in LangGraph, its data, its safe database and its reward."""
