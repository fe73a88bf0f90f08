"""Agent replay: recorded coding-agent conversations sent again, turn by turn, to a live server.

Each part knows as little as it can: `formats` read files into `conversation`, `plan` decides what is sent and
what an infinite prefix cache would save (`theory`, `tokens`), `client` speaks the server's protocol, `runner`
puts the two together, and `summary`, `table`, `report` and `compare` see only the records.
"""
