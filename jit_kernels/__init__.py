"""One module per op. Each op is a public function on tensors with a torch reference that runs on any device."""
