"""What every framework's adapter stands on: library, daemon, control calls, attachments. Imports no framework."""
