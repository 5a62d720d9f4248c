"""What will it cost on a thousand GPUs: memory, time, bubble and traffic of any plan, without running it."""
