"""OpenAI-compatible model calls on every agent's path: label, route, forward, record, answer.

`request` reads what the agent sent, `responses` makes a chat completion of a request for a response, `target` decides
who answers, `sampled` collects the exact tokens, `events` reads server-sent events, `forms` writes the answer, and
`handler` is the life of one call.
"""
