"""What a chat model writes and reads: messages with tools on the way in; reasoning, content and tool calls on the way
out."""
