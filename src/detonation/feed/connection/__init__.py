"""The connection between a feed and a follower: both prove that they know a token, then frames go one way.

`token` has the handshake, `frames` what is sent, `listener` lets in who knows the token. It knows nothing of weights.
"""
