"""What runs did, and what they do now: from the files that they write."""
